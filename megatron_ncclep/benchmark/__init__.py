"""`ncclep bench` and `ncclep plot`: what each way to move tokens costs, checked before it is timed.

Reading order: command.py (arguments, starting the ranks), job.py and shapes.py (what was asked),
run.py (one shape on one rank), subjects.py (what can be measured, by name) with engine_subject.py,
library_subject.py, megatron_setup.py and megatron_subject.py, layer.py and layer_subject.py,
payload.py, routes.py, check.py and layer_reference.py (what is right), timing.py, ceiling.py (what
the links give), result.py, table.py and plot.py (what is shown).  worker.py only starts run.py in a
process of the pool.
"""
