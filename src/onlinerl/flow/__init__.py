"""Workers and the channels that join them."""
