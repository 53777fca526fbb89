"""`mmdgs demo`: Figures 1 and 2 of the paper, its Table 1 on one data set, and digits."""
