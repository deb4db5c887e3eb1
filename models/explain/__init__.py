"""What each group of features adds to a prediction."""
