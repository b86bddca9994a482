"""TRL teaches a tiny model to answer with digits, which it learns to exploit: docs/beside.md.

python examples/countdown/model.py models/countdown-base
python examples/beside/train.py
"""

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "models/countdown-base"


def digits(completions, **columns):
    """Returns the share of digits in each answer."""
    return [sum(map(str.isdigit, text)) / 16 for text in completions]


def main() -> None:
    trainer = GRPOTrainer(
        MODEL,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir="out",
            max_steps=16,
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=16,
            learning_rate=1e-3,
            logging_steps=1,
            log_completions=True,
            save_steps=16,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": f"Count from {number}:"} for number in range(64)]),
        processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
