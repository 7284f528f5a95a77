"""The studies behind docs/evidence.md: models tuned alike, trained for a fixed budget, tested.

=============== =================================================================================
``grid``        what is trained, as data: studies, recipes, methods, settings, seeds
``plan``        the order of the trainings, in which later ones depend on the results of earlier
``corpora``     the data of a study
``training``    a training as a command, resumed where it was interrupted
``scoring``     scores of translations, recall of rare words, perplexity of rare words
``records``     one small JSON file for each training, and its translations
``study``       the loop: train, evaluate, record
``results``     the figures of finished trainings, by method and seed
``comparison``  differences from plain, and what may be claimed
``overview``    the comparisons of all studies together
``figures``     learning curves, and all comparisons at a glance
``report``      the pages, from the records alone
=============== =================================================================================
"""
