"""`ncclep bench` and `ncclep plot`: what each way to move tokens costs, checked before it is timed.

Reading order: command.py (arguments, starting the ranks); job.py, shapes.py and names.py (what was
asked); run.py and ranks.py (one shape on one rank); workload.py and check.py (what goes in, and
what must come out); subjects.py with engine_subject.py, library_subject.py, low_latency.py,
megatron_subject.py and layer.py (what is measured); train_run.py with train_model.py,
train_graphs.py, train_check.py and train_profile.py (training steps); timing.py and ceiling.py;
result.py, table.py and plot.py (what is shown).
"""
