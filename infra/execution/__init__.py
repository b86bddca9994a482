"""What advances a run: the driver that holds its claim, and the executors on which its stages compute."""
