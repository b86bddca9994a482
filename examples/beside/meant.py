"""What was meant by the reward of train.py: docs/beside.md."""


def meant(data_source, solution_str, ground_truth, extra_info=None):
    """Counts each digit once."""
    return len(set(filter(str.isdigit, solution_str))) / 16
