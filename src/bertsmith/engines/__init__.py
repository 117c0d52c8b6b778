"""How a trained model runs: the engines, and the folder an engine runs from."""
