"""LoRA adapters: their options, their files, and the slots that loaded ones have in the engine."""
