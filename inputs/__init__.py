"""Reads the user's input and refuses bad input with a one-line message. Opens no model and starts nothing."""
