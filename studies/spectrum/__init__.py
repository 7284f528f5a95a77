"""The study behind studies/spectrum: what each form of spectrum control costs in learning.

=============== =================================================================================
``grid``        what is trained, as data: the models, and the forms of control
``training``    one training, and its figures from fairseq's log and the checkpoint
``records``     the figures of finished trainings, kept in one JSON file
``report``      the table of the page, from the records alone
=============== =================================================================================
"""
