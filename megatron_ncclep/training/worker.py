"""One rank of a prepared job: `python -m megatron_ncclep.training.worker JOB.json`.

Nothing is imported before the guard: Megatron's checkpoint writer spawns a small helper process,
which imports this module again, and would otherwise spend seconds on importing torch.
"""

if __name__ == "__main__":
    import signal

    # Ctrl-C ends a rank at once, as a plain kill does, and not with a traceback from each of them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    import sys
    from pathlib import Path

    from megatron_ncclep.failures import run_told
    from megatron_ncclep.training.job import Job

    def main() -> int:
        """Train; an import that fails is told as everything else."""
        from megatron_ncclep.training.loop import run

        run(Job.load(Path(sys.argv[1])), prepared=True)
        return 0

    sys.exit(run_told("ncclep train", main))
