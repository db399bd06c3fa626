"""Cases, payloads and the table oracle, which the tests and the benchmark share."""
