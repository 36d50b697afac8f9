#!/bin/bash
wc -l < notes.txt > count.txt
