"""`twellc check`: compare a candidate with the model that it was made from."""
