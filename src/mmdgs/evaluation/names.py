"""The metrics by name; the command line reads them without torch."""

OF_FEATURES = ("fid", "kid", "precision-recall", "is")
METRICS = (*OF_FEATURES, "diversity", "classes")
