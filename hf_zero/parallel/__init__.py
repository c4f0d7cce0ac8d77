"""What shares out the computation of one micro-batch over ranks: layers of a model, tokens of a sequence."""
