"""Reads, creates, saves and exports weights by their Hugging Face names, and defines the policy: base and adapters."""
