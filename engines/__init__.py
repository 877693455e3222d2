"""What samples (the embedded sampler, vLLM), and the test of whether it has the policy."""
