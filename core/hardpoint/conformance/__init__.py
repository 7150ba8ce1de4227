"""What the engine adds to the conformance kit: the scheduler contract and whole tiny models."""
