"""Prompts on which SmolLM2-135M-Instruct is sure of itself: its top two logits are well apart at every position."""

PROMPTS = (
    "What is the capital of France?",
    "Count from one to twenty in English words.",
    "Write one sentence about the sea.",
    "What is two plus two?",
    "Name three fruits.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List the days of the week.",
)
