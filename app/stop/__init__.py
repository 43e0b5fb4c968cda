"""Early stopping: `stop.at_accuracy` and `stop.patience`.

Only recorded evaluations count: a resumed run stops where an uninterrupted one would, and changed settings of `stop`
apply to its earlier evaluations too.
"""

from collections.abc import Mapping

from app.config.stop import StopConfig


def stop_reason(stop: StopConfig, accuracies: Mapping[int, float], *, step: int, last_step: int) -> str | None:
    """Return why a run ends after `step`; None if it goes on, or if this is its last step anyway.

    A run is not ended by the evaluation before training, with which later ones are compared.

    Args:
        accuracies: `eval/accuracy` by step, the steps in order; 0 is before training.
        step: The step that was finished last.
        last_step: The last step of the run.

    >>> stop_reason(StopConfig(at_accuracy=0.9), {0: 0.2, 20: 0.92}, step=20, last_step=60)
    'stop.at_accuracy=0.9 is reached: eval/accuracy is 0.92 at step 20'
    >>> stop_reason(StopConfig(patience=2), {0: 0.2, 20: 0.5, 40: 0.4, 60: 0.5}, step=60, last_step=80)
    'stop.patience=2: no evaluation since step 20 exceeds its eval/accuracy of 0.5'
    """
    if not 0 < step < last_step or step not in accuracies:
        return None
    if stop.at_accuracy is not None and accuracies[step] >= stop.at_accuracy:
        reached = f"eval/accuracy is {accuracies[step]:.3g} at step {step}"
        return f"stop.at_accuracy={stop.at_accuracy:g} is reached: {reached}"

    best = max(accuracies, key=accuracies.__getitem__)  # the first of equal ones
    since = sum(each > best for each in accuracies)
    if stop.patience is not None and since >= stop.patience:
        exceeds = f"exceeds its eval/accuracy of {accuracies[best]:.3g}"
        return f"stop.patience={stop.patience}: no evaluation since step {best} {exceeds}"
    return None
