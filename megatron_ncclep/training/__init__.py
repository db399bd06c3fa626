"""The main job, `ncclep train`: a mixture-of-experts GPT trained with Megatron-Core's own parts.

Reading order: command.py (options, starting the ranks), job.py (the whole job as data), settings.py
(a file of configs/model, checked), model.py (settings -> a model that trains), corpus.py (text ->
indexed data set), data.py (data set -> batches), loop.py (the job on one rank), checkpoint.py,
log.py and report.py (the output).
"""
