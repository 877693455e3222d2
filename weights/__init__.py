"""Where weights come from and go to, under their Hugging Face names."""
