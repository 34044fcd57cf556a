"""Studies of Gaussian pairs, whose optimal encoders are known in closed form."""
