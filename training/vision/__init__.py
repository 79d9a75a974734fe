"""How the bundled vision model is made: generated images, questions, training. See training/README.md."""
