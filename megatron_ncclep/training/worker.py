"""One rank of a prepared job: `python -m megatron_ncclep.training.worker JOB.json`.

Nothing is imported before the guard: Megatron's checkpoint writer spawns a small helper process,
which imports this module again, and would otherwise spend seconds on importing torch.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from megatron_ncclep.training.job import Job
    from megatron_ncclep.training.loop import run

    run(Job.load(Path(sys.argv[1])), prepared=True)
