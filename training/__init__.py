"""How the bundled demonstration model and its drafter were made: text generators, training, export, evaluation."""
