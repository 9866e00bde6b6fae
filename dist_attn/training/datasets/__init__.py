"""The data of training: text and labelled text.

Every dataset is a pure function of its configuration and the step: a resumed run reads what an undisturbed one would.
"""
