"""The studies behind docs/evidence.md: models trained to the end, tuned alike, tested.

=============== =================================================================================
``grid``        what is trained, as data: studies, recipes, methods, settings, seeds
``plan``        the order of the trainings, in which later ones depend on the results of earlier
``corpora``     the data of a study
``training``    a training as a command, resumed where it was interrupted
``scoring``     scores of translations, recall of rare words, perplexity of rare words
``records``     one small JSON file for each training, and its translations
``study``       the loop: train, evaluate, record
``report``      tables and figures, from the records alone
=============== =================================================================================
"""
