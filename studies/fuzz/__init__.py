"""Options, hostile files and kills at random: ``make fuzz``."""
