"""What the plugin's features need of fairseq's trainer and loader, as patches of them."""
