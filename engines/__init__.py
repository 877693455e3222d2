"""The engines that sample (the embedded sampler and vLLM), and the test that an engine has the trainer's policy."""
