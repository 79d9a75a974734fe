"""How the bundled vision model is made: pictures drawn here, questions about them, training. See training/README.md."""
