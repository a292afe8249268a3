"""The parts of the example `train_gpt.py`: options, data, model, training, checkpoint, report."""
