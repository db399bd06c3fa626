"""Cases, oracle, comparison and launcher: shared by the tests and the benchmarks."""
