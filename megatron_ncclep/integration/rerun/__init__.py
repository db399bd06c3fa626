"""Steps in which rows did not fit are run again: `on_overflow="rerun"`."""
