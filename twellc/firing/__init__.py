"""How often a model's neurons fire: count it on the user's data, keep it in a profile, and calibrate by it."""
