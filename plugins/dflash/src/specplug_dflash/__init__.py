"""DFLASH and DSPARK for specplug: one forward of a small draft fills a whole block."""
