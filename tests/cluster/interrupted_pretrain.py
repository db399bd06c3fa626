"""pretrain_gpt.py, but the first run waits in its fourth iteration for a signal to end."""

import os
import time


def main():
    """Run the script's `main` with a `forward_step` that waits for the signal."""
    import pretrain_gpt  # here: the processes that write checkpoints import this file again
    from megatron.training.global_vars import get_signal_handler

    train_forward_step, steps = pretrain_gpt.forward_step, 0

    def forward_step(data_iterator, model):
        nonlocal steps
        steps += 1
        if steps == 4 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            os.write(1, f"rank {os.environ['RANK']} waits\n".encode())
            while not get_signal_handler()._signal_received:
                time.sleep(0.01)
        return train_forward_step(data_iterator, model)

    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
