"""How the bundled demo model and its drafter were made: text generators, training, export, evaluation."""
