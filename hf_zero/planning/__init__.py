"""Predicts memory and communication of a run by letting the engine train the model on the meta device."""
