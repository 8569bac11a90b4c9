"""How attempts end. Pure. One incident stands for one ended attempt."""
