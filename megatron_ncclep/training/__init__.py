"""The main job, `ncclep train`: a mixture-of-experts GPT trained with Megatron-Core's own parts.

Reading order: command.py (arguments, starting the ranks), arguments.py and settings.py
(configs/model -> Megatron objects), job.py (the whole job as data), corpus.py (text -> indexed
data set), data.py (data set -> batches),
loop.py (the job on one rank), balance.py, checkpoint.py, log.py and report.py (what is written and
shown).  worker.py only starts loop.py.
"""
