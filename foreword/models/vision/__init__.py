"""Vision-language models: one file per architecture, and the vision encoders ("towers") that they share."""
