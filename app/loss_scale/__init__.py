"""The page Loss scale: trajectory, windows of every module, the scaler lab."""
