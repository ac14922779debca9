"""One training run: DataReceiver, ComputeReward, Trainer. Imports torch."""
