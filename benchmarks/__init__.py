"""Benchmarks of a checkout, which are not installed: everything beside our own engines.

    python -m benchmarks [OPTIONS]     engines, other libraries, Megatron-Core's dispatchers, whole
                                       layers and trainings; --model-network
    python -m benchmarks.plot RESULT   draw a bench.json
    python -m benchmarks.waterfall     draw traces again that --trace has written

It measures as `ncclep bench` does (megatron_ncclep/benchmark), with more kinds of subjects: their
names are in catalogue.py and job.py makes them, of library.py (NVIDIA's), deepep.py, layers.py with
layer_model.py, liger_cute.py, and training.py with training_model.py, routers.py and profiles.py;
their shapes are in configs/ and ../configs/benchmark/.  result.py, table.py, plot.py and
waterfall.py are the output.  results/ has what was measured, by date and machine.  With
collectivex.py, another benchmark measures our engines.
"""
