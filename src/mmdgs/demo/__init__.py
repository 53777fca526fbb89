"""`mmdgs demo`: Figures 1 and 2 of the paper, Table 1 on one data set, digits, a photograph."""
