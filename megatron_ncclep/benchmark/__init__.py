"""`ncclep bench` and `ncclep plot`: what each way to move tokens costs, checked before it is timed.

Reading order: command.py (arguments, starting the ranks), job.py and shapes.py (what was asked),
run.py and ranks.py (one shape on one rank), catalogue.py, dispatchers.py and variants.py (what can
be measured, by name), subjects.py with engine_subject.py, library_subject.py, megatron_setup.py and
megatron_subject.py, layer_names.py, layer.py and layer_subject.py, payload.py, routes.py, check.py
and layer_reference.py (what is right), timing.py, ceiling.py (what the links give), result.py,
table.py, text.py and plot.py (what is shown).  worker.py only starts a run on a rank.

Whole training steps are files of their own: train_names.py and train_shapes.py (what was asked),
train_run.py (one shape on one rank), train_model.py and train_graphs.py (what is stepped),
train_check.py (what is right), train_profile.py and kernel_kinds.py (where the time goes),
train_result.py, train_table.py and train_plot.py.
"""
