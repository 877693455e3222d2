"""Reads the user's input and refuses bad input in one line. Opens no model and starts nothing."""
