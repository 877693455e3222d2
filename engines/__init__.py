"""The engines that sample (the embedded sampler and vLLM), and the test that compares them with the trainer."""
