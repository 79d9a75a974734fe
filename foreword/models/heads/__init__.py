"""Trained heads, which draft from the target's hidden states."""
