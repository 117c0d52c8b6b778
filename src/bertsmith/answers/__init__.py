"""Read rows and decode model outputs into answers, for each kind of task; needs numpy, not PyTorch."""
